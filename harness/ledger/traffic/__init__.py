"""What each way of cutting a model exchanges in a step; harness.ledger.communication puts them together."""
