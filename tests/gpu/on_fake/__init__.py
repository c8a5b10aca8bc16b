"""Tests that run on the fake driver."""
