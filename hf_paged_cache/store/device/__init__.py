"""What pools need of a device: memory, tables, streams, flags."""
