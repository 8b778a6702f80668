"""Which labels are wrong: from cross-fitted predictions to a private list at every site."""
