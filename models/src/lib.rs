//! The small models of kv-eval, as they are built into the program: it then runs wherever it is
//! installed.
//!
//! ```
//! let model = &kv_eval_models::AUSTEN;
//! assert_eq!(model.name, "austen");
//! assert!(model.files.iter().any(|(name, _)| *name == "config.json"));
//! ```

use std::{fs, io, path::Path};

/// The files of a model.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct BuiltIn {
    /// The name of its folder.
    pub name: &'static str,
    /// Names and contents.
    pub files: &'static [(&'static str, &'static [u8])],
}

macro_rules! built_in {
    ($folder:literal: $($file:literal),+) => {
        BuiltIn {
            name: $folder,
            files: &[$(($file, include_bytes!(concat!("../", $folder, "/", $file)))),+],
        }
    };
}

/// A language model trained on Jane Austen.
pub const AUSTEN: BuiltIn = built_in!("austen":
    "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json");

/// The model austen after training with a 2-bit cache.
pub const AUSTEN_K2V2_GFLUSH: BuiltIn = built_in!("austen-k2v2-gflush":
    "config.json", "kv_cache.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json");

/// A world model of a maze.
pub const WORLD: BuiltIn = built_in!("world":
    "codec.safetensors", "config.json", "model.safetensors", "world.json");

/// A novel that neither language model was trained on.
pub const HELDOUT: &str = include_str!("../austen/heldout.txt");

/// Where [`HELDOUT`] is in the repository.
pub const HELDOUT_NAME: &str = "models/austen/heldout.txt";

impl BuiltIn {
    /// All of them.
    pub const ALL: [&Self; 3] = [&AUSTEN, &AUSTEN_K2V2_GFLUSH, &WORLD];

    /// Bytes of all files.
    pub fn bytes(&self) -> usize {
        self.files.iter().map(|(_, bytes)| bytes.len()).sum()
    }

    /// Writes the files into `folder`, which must be there.
    ///
    /// # Errors
    /// What the system says.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        self.files.iter().try_for_each(|(name, bytes)| fs::write(folder.join(name), bytes))
    }
}
