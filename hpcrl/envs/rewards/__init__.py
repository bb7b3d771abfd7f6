"""Rewards: functions that score one response, each known by a name."""
