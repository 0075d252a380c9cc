"""What a run will take in memory and time, before it takes it: shapes, probes, predictions, the choice."""
