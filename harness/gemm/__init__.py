"""Matrix products on the hardware's own paths: the operands they take, and how long they take."""
