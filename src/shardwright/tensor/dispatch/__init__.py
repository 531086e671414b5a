"""From a call of torch with DTensors to local calls: op → rule → choice → movement → local call."""
