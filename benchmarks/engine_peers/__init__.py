"""The parts of the engine comparison: one worker program a side, what starts them, and what judges their answers."""
