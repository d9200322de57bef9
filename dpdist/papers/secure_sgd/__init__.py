"""PixelDP, the heterogeneous Gaussian mechanism and Secure-SGD (Phan et al., IJCAI 2019)."""
