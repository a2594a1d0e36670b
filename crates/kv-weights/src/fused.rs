//! What comes before and after a product.

/// The nonlinearity of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Gate {
    /// `x * sigmoid(x)`: SwiGLU, <https://arxiv.org/abs/2002.05202>.
    Silu,
    /// GELU by its approximation with tanh: GeGLU.
    GeluTanh,
}
