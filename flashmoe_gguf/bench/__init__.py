"""Measuring: generated models of real shape, and (later) the A/B bench itself."""
