"""DINOv2 with registers (Darcet et al. 2023): see dinov2.py, where it differs by one value."""

from __future__ import annotations

from regard.models.families.dinov2 import REGISTERS as FAMILY

__all__ = ["FAMILY"]
