"""What trains and watches. torch is imported here and nowhere else, and only inside a worker process."""
