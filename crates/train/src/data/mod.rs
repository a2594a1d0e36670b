//! From texts to batches: texts are tokenized once into a file, cut into windows, and shuffled so
//! that a run can resume at any position.
//!
//! ```no_run
//! use std::{path::Path, sync::Arc};
//!
//! use burn::tensor::Device;
//! use kv_train::data::{Order, Source, TokenFile, TrainLoader, ValidLoader, Windows};
//!
//! # use kv_train::data::DataError;
//! # fn open(tokenizer: &kv_models::Tokenizer, device: Device) -> Result<(), DataError> {
//! let source = Source::new(["texts/emma.txt", "texts/enwiki.jsonl"]);
//! let model = Path::new("models/austen"); // its tokenizer.json is part of the fingerprint
//! let tokens = TokenFile::open(&source, tokenizer, model, Path::new("cache"))?;
//! tokens.require_vocab(tokenizer.n_ids())?;
//! let (train, valid) = Windows::new(Arc::new(tokens), 512)?.hold_out(0.05)?;
//! let order = Order::new(17, train.len())?;
//! // 100 batches of 8 windows per epoch, starting with the first epoch.
//! let train = TrainLoader::new(Arc::new(train), order, 8, 100, 0, device.clone())?;
//! let valid = ValidLoader::new(Arc::new(valid), 8, 64, device.inner())?;
//! # Ok(())
//! # }
//! ```

mod error;
mod loader;
mod order;
mod source;
mod token_file;
mod windows;

pub use error::DataError;
pub use loader::{Batch, TrainLoader, ValidLoader};
pub use order::Order;
pub use source::Source;
pub use token_file::{Origin, TokenFile};
pub use windows::Windows;
