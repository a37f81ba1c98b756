"""Trains models, distils drafters, and trains heads; every run goes on after a kill."""
