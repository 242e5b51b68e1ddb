"""Tests of polyfed.reproduce."""
