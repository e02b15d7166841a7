"""What a checkpoint is, in any format: a map from fqn to typed boxes, cut into chunks, each stored as one item.

Values and arithmetic on them; knows no format and executes nothing.

extents     where bytes are (extent, record, payload) and which box they are (chunk)
dtypes      element types and their spellings
numbers     arrays of any dtype as plain numbers
regions     boxes of n-d arrays
chunks      all chunks of a checkpoint as columns of numbers
entries     a tensor or an object under its name; what a format's reader gives to get at bytes
checkpoint  the mapping itself
items       all items by file, in the order of their bytes
fill        one box of one payload copied, its CRC32 checked
boxes       a box of a tensor read out of its chunks
layouts     how a tensor was sharded, as boxes and ranks tell
cover       what chunks leave out, and what several hold
pieces      what a piece of a tensor made of tensors holds, and how it is cut
subclasses  which tensors of a checkpoint are made of tensors, and their pieces
scaled      which tensors stand for others, with scales beside
casting     what a cast loses
selection   which entries go where, under which name and dtype
families    names that belong to one rank each
steps       which step a checkpoint is, by the name of its folder
format      what sets formats apart, as values
kinds       the kinds of findings there are
findings    what looking finds
"""
