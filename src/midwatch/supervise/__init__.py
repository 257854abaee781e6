"""Launching, watching and restarting a run: a pure decision core and the shells that act for it.

``decide`` and ``messages`` are rooms of their own: the simulator and triage import them without the network stack, so
this file names nothing else eagerly.
"""

from __future__ import annotations
