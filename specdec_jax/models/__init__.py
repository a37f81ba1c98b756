"""Networks: the only place where linen is used."""
