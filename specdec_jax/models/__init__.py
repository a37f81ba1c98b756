"""Networks, their caches and layouts: the only package where linen is used."""
