"""Clients' models outside their run: read without data, written in formats that other programs read."""
