"""The meeting point of replicas that come and go: a process that decides who is in, and its client.

Replicas ask it when one joins or dies. Rounds need it not, and go on while it is down.
"""
