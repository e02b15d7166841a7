"""convert: any format to any other, everything checked on the way."""
