"""`mlxft quantize`: a model with fewer bits a weight, written as a folder that everything else here loads."""
