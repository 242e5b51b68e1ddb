"""Importing this is what a test forbids."""

Code = None
