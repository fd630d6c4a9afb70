"""How planned slices reach an engine: transports, and the transaction around them."""
