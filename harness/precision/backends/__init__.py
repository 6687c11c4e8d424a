"""What runs a recipe: casts imitated on any device, PyTorch's scaled products, or Transformer Engine's modules.

`requirements`, `select.choose_backend`, `te_recipe` and `te_table` import no torch; `apply`, `torch_native` and
`transformer_engine` do.
"""
