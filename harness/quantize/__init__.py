"""What number formats would do to the tensors of a file: readers, the measurement, writers, and the worker process."""
