"""Networks, their caches, layouts and vocabularies: the only room where linen is used."""
