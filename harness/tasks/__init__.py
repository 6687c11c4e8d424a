"""What a run does; one module a task, named in harness.registry."""
