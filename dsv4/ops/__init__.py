"""The contract of every operator: public function, schema, shape function. Imports torch alone."""
