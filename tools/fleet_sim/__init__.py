"""Predicts fleets of devices and servers from measured costs, and checks that with real runs."""
