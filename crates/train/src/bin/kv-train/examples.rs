//! The examples at the end of each `--help`.

pub(crate) const ALL: &str = "\
Example:
  kv-train qat --model models/austen --text book.txt --cache k2v2 --out runs/austen

kv-train COMMAND --help has examples of each command.";

pub(crate) const QAT: &str = "\
Examples:
  # All weights, for a cache of 2 bits
  kv-train qat --model models/austen --text book.txt --cache k2v2 --scale-gradient --steps 500 \\
      --lr 1e-3 --out runs/austen

  # Adapters on the packed weights of a GGUF file
  kv-train qat --model model.Q4_K_M.gguf --weights packed --lora 8 --text chats.jsonl \\
      --cache k4v4 --out runs/chats";

pub(crate) const PRETRAIN: &str = "\
Examples:
  kv-train pretrain --text book.txt --vocab 1024 --layers 4 --steps 2000 --out runs/small

  # Go on with longer sequences
  kv-train pretrain --from runs/small/model --text book.txt --seq-len 4096 --batch 1 --lr 5e-4 \\
      --out runs/long";

pub(crate) const WORLD: &str = "\
Examples:
  kv-train world --out runs/maze
  kv-train world --from runs/maze/model --steps 500 --two-step 100 --out runs/maze-2";

pub(crate) const BENCH: &str = "\
Example:
  kv-train bench --model models/austen --cache k2v2 --seq-len 512 --batch 2";

#[cfg(feature = "remote")]
pub(crate) const WORKER: &str = "\
Examples:
  # For runs on this machine
  kv-train worker

  # For runs on other machines of a trusted network, with the token in a file
  kv-train worker --listen 10.0.0.2:3000 --devices flex:1 --token-file token
  kv-train qat --model models/austen --text book.txt --cache k2v2 --token-file token \\
      --devices remote:10.0.0.2:3000/0,10.0.0.3:3000/0 --out runs/austen";

pub(crate) const RESUME: &str = "\
Examples:
  kv-train resume runs/austen
  kv-train resume runs/austen --from-step 100";

pub(crate) const QUANTIZE: &str = "\
Examples:
  # Smallest loss at about 5.5 bits a weight
  kv-train quantize --model owner/name --format int4 --attention int8 --range least-error \\
      --out small

  # A folder that the transformers library loads
  kv-train quantize --model owner/name --format int4 --group 64 --for transformers --out small";

pub(crate) const EXPORT: &str = "\
Examples:
  kv-train export runs/austen
  kv-train export runs/austen --step 75 --out austen-75";
