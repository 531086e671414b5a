"""Dispatch of torch calls with DTensors: operator → rule → strategy → redistribution → local call."""
