"""Networks, their caches, layouts and vocabularies: the only package where linen is used."""
