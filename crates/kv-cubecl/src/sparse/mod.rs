//! Sparse attention over compressed entries, as in DeepSeek-V4 (2026).
//!
//! A layer keeps a sliding window of recent tokens, one row each that serves as key and value of
//! all heads. Older tokens are compressed: every `ratio` tokens give one entry, a row like theirs.
//! A query attends to its window and to entries in one softmax. With few entries it attends to all
//! of them; otherwise an indexer, which has smaller keys for the entries, selects `top_k`.

mod attention;
mod cache;
mod compression;
mod compressor;
mod config;
mod entries;
mod layout;
mod memory;
mod ops;
mod parts;
mod plan;
mod rope;
mod rounded;
mod select;
mod sequence;
mod slots;
mod span;
mod store;
mod trace;

pub use attention::{Compressed, SparseOptions, sparse_attention};
pub use cache::{SparseBytes, SparseCache, SparseCounters};
pub use compression::Compression;
pub use compressor::{EntryCompressor, Gated, KeyCompressor};
pub use config::{IndexConfig, RowFormat, SparseConfig};
pub use entries::Entries;
pub use layout::RowLayout;
pub use memory::{SparseMemory, Visible};
pub use ops::{AttendInputs, PoolInputs, Rows, SparseOps};
pub use parts::SparsePartLayout;
pub use plan::{AttendPlan, PoolPlan, Stride};
pub use rope::rope_pairs;
pub use select::{IndexQuery, Selection, index_scores, select_entries};
pub use slots::{SparsePart, SparseTensor};
pub use trace::{IndexTrace, SparseTrace};
