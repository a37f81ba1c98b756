"""Trains models, distils drafters, and trains heads; every run resumes after a kill."""
