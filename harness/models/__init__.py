"""Plain, readable models. `transformer.build` makes one from a `ModelSpec`."""
