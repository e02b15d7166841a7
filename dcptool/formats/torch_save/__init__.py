"""`.pt` files of torch.save, and the zip they are, which items of a DCP directory are too.

zip        the zip that torch.save writes
zip_scan   such zips that lie back to back, with nothing to tell where one ends
items      tensors and objects inside such a zip
graphs     tensors and objects as torch pickles them, to be written
stream     the form such a file had before torch 1.6
files      one file loaded as stand-ins
flatten    nested values by path
source     finds and reads what lies in one file or in several
build      a `Checkpoint` out of whole tensors, pieces of larger ones, and objects
one_rank   what to say of a file with one rank's parts of tensors
reader     a file into a `Checkpoint`
zip_write  such a zip laid out
write      a file laid out
"""
