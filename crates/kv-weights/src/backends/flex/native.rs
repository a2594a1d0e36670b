//! The instruction set that most processors of this architecture have.

#[cfg(target_arch = "x86_64")]
pub(super) type Native = super::avx2::Avx2;
#[cfg(target_arch = "aarch64")]
pub(super) type Native = super::neon::Neon;
