"""Graders, and the machinery that runs reward functions of users."""
