"""How bytes move from a checkpoint into new files, band by band, every CRC32 checked on the way.

outputs     what a file is to be made of, as values
reading     a tensor in bands
schedule    in which order files are made of their parts
engine      threads that read ahead, one writer per group of files
publishing  a place under a temporary name, until the output is complete
"""
