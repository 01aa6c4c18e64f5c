"""Seconds: actions at op level or as (max, +) chunks, and where a step's time goes."""
