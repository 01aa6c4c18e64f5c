"""The engine: plans become actions, and actions become bytes and seconds."""
