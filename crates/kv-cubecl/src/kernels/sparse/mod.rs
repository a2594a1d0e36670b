//! Sparse attention: stores of rows, compression to entries, scores of keys, selection, attention.

mod attend;
mod pool;
mod rows;
mod score;
mod select;
mod store;
#[cfg(all(test, feature = "cuda-source"))]
mod tests;

pub(crate) use attend::{AttendBindings, AttendProblem, launch_attend, launch_merge};
pub(crate) use pool::{PoolBindings, launch_pool};
pub(crate) use score::{ScoreProblem, launch_scores};
pub(crate) use select::{SelectProblem, launch_select};
pub(crate) use store::{launch_put_codes, launch_put_floats, launch_tail};
