//! Arguments of workers, the servers of devices of other machines.

use std::{env, fmt, fs, path::PathBuf, time::Duration};

use anyhow::{Context, Result, bail};

/// The environment variable that holds the token.
const VARIABLE: &str = "KV_WORKER_TOKEN";

/// A secret that a worker and its clients share. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct WorkerToken(String);

impl WorkerToken {
    /// Returns the secret.
    pub fn secret(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for WorkerToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WorkerToken(..)")
    }
}

/// Where the token of workers comes from. The command line never holds it, because other users of a
/// machine can read command lines.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct TokenArgs {
    /// File with the token of the workers, instead of the environment variable KV_WORKER_TOKEN.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

impl TokenArgs {
    /// Returns the token; `None` if there is neither a file nor the variable.
    ///
    /// # Errors
    /// A file that cannot be read, or a token that is empty or not text.
    pub fn read(&self) -> Result<Option<WorkerToken>> {
        let (source, text) = match &self.token_file {
            Some(path) => {
                let source = format!("token-file {}", path.display());
                let text =
                    fs::read_to_string(path).with_context(|| format!("{source}: no token"))?;
                (source, text)
            }
            None => match env::var(VARIABLE) {
                Ok(text) => (VARIABLE.to_string(), text),
                Err(env::VarError::NotPresent) => return Ok(None),
                Err(env::VarError::NotUnicode(_)) => bail!("{VARIABLE}: must be UTF-8"),
            },
        };
        match text.trim_end_matches(['\r', '\n']) {
            "" => bail!("{source}: is empty; write a token, such as 32 random letters"),
            token => Ok(Some(WorkerToken(token.to_string()))),
        }
    }
}

/// The arguments of programs that use workers.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct WorkerArgs {
    #[command(flatten)]
    pub(super) token: TokenArgs,
    /// Seconds that a worker may not answer, or may take for its share of an optimizer step.
    /// Then the program ends with an error.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 600,
        value_parser = clap::value_parser!(u64).range(1..),
    )]
    worker_deadline: u64,
}

impl WorkerArgs {
    /// Returns how long workers may take.
    pub fn deadline(&self) -> Duration {
        Duration::from_secs(self.worker_deadline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_read_from_a_file_and_never_shown() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let args = TokenArgs { token_file: Some(path.clone()) };
        let missing = args.read().unwrap_err().to_string();
        assert!(missing.contains("no token"), "{missing}");
        fs::write(&path, "s3cret \n").unwrap();
        let token = args.read().unwrap().unwrap();
        assert_eq!(token.secret(), "s3cret ");
        assert!(!format!("{token:?}").contains("s3cret"));
        fs::write(&path, "\n").unwrap();
        assert!(args.read().unwrap_err().to_string().contains("is empty"));
    }
}
