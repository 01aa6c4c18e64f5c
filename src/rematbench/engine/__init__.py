"""The engine turns plans into actions, and actions into bytes and seconds."""
