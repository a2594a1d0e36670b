//! Prompts as a trie of blocks: prompts with the same first blocks share them.

use std::collections::BTreeMap;

/// The number of a node. Numbers are not used again.
pub(super) type Id = u64;

/// A block of tokens after the blocks of its ancestors. A root has no block.
#[derive(Clone, Debug)]
struct Node {
    parent: Option<Id>,
    /// The nodes of the next blocks, by their tokens.
    children: BTreeMap<Box<[u32]>, Id>,
    /// The pieces of all layers for the block.
    piece: Box<[u8]>,
    /// The part of a cache that ends here which is not in pieces. A lookup can end only at a node
    /// with a tail.
    tail: Option<Box<[u8]>>,
    last_use: u64,
    /// The last time that a lookup or an insertion ended here.
    last_end: u64,
}

/// The number of removed blocks and tails.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Evicted {
    pub(super) blocks: usize,
    pub(super) tails: usize,
}

/// A block to add.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) piece: Box<[u8]>,
    pub(super) tail: Option<Box<[u8]>>,
}

#[derive(Clone, Debug)]
pub(super) struct Trie {
    block_tokens: usize,
    nodes: BTreeMap<Id, Node>,
    /// The root of each salt.
    roots: BTreeMap<Box<str>, Id>,
    next: Id,
    clock: u64,
    bytes: usize,
}

impl Trie {
    pub(super) fn new(block_tokens: usize) -> Self {
        let (nodes, roots) = Default::default();
        Self { block_tokens, nodes, roots, next: 0, clock: 0, bytes: 0 }
    }

    /// Returns the number of blocks.
    pub(super) fn blocks(&self) -> usize {
        self.nodes.len() - self.roots.len()
    }

    /// Returns the bytes of pieces, tails, tokens and salts.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the nodes of the longest stored prefix of `tokens` in whole blocks, first to last.
    pub(super) fn path(&self, salt: &str, tokens: &[u32]) -> Vec<Id> {
        let mut path = vec![];
        let mut at = self.roots.get(salt);
        for block in tokens.chunks_exact(self.block_tokens) {
            at = at.and_then(|id| self.nodes[id].children.get(block));
            match at {
                Some(id) => path.push(*id),
                None => break,
            }
        }
        path
    }

    pub(super) fn piece(&self, id: Id) -> &[u8] {
        &self.nodes[&id].piece
    }

    /// Returns the tail of a cache that ends at a node, if it is stored.
    pub(super) fn tail(&self, id: Id) -> Option<&[u8]> {
        self.nodes[&id].tail.as_deref()
    }

    /// Returns the bytes that a first block of `salt` adds for the salt.
    pub(super) fn new_salt_bytes(&self, salt: &str) -> usize {
        if self.roots.contains_key(salt) { 0 } else { salt.len() }
    }

    /// Returns the bytes of the piece and the tokens of a node.
    pub(super) fn block_bytes(&self, id: Id) -> usize {
        bytes(self.block_tokens, &self.nodes[&id].piece, None)
    }

    /// Returns the bytes of a node.
    fn bytes_of(&self, id: Id) -> usize {
        let Node { piece, tail, .. } = &self.nodes[&id];
        bytes(self.block_tokens, piece, tail.as_deref())
    }

    /// Marks a path as used now.
    pub(super) fn touch(&mut self, path: &[Id]) {
        self.clock += 1;
        for (i, id) in path.iter().enumerate() {
            if let Some(node) = self.nodes.get_mut(id) {
                node.last_use = self.clock;
                if i + 1 == path.len() {
                    node.last_end = self.clock;
                }
            }
        }
    }

    /// Stores or removes the tail of a cache that ends at a node.
    pub(super) fn set_tail(&mut self, id: Id, tail: Option<Box<[u8]>>) {
        let before = self.bytes_of(id);
        if let Some(node) = self.nodes.get_mut(&id) {
            node.tail = tail;
        }
        self.bytes = self.bytes - before + self.bytes_of(id);
    }

    /// Adds `blocks` after the nodes of `path`; `tokens` are those of the path and the blocks.
    /// Returns the nodes of all of them.
    pub(super) fn extend(
        &mut self,
        salt: &str,
        mut path: Vec<Id>,
        tokens: &[u32],
        blocks: Vec<Block>,
    ) -> Vec<Id> {
        let mut parent = path.last().copied().unwrap_or_else(|| self.root(salt));
        let added = tokens.chunks_exact(self.block_tokens).skip(path.len());
        for (Block { piece, tail }, tokens) in blocks.into_iter().zip(added) {
            self.bytes += bytes(self.block_tokens, &piece, tail.as_deref());
            let id = self.put(Some(parent), piece, tail);
            if let Some(node) = self.nodes.get_mut(&parent) {
                node.children.insert(tokens.into(), id);
            }
            path.push(id);
            parent = id;
        }
        path
    }

    fn root(&mut self, salt: &str) -> Id {
        match self.roots.get(salt) {
            Some(&root) => root,
            None => {
                let root = self.put(None, [].into(), None);
                self.roots.insert(salt.into(), root);
                self.bytes += salt.len();
                root
            }
        }
    }

    fn put(&mut self, parent: Option<Id>, piece: Box<[u8]>, tail: Option<Box<[u8]>>) -> Id {
        let (id, children) = (self.next, BTreeMap::new());
        self.next += 1;
        let (last_use, last_end) = (self.clock, self.clock);
        self.nodes.insert(id, Node { parent, children, piece, tail, last_use, last_end });
        id
    }

    /// Removes what was not used for the longest time: a leaf, and then its ancestors without a
    /// child or a tail; or the tail of another node. Nodes of `kept` stay, but not their tails.
    /// Returns `None` if there is nothing to remove.
    pub(super) fn evict(&mut self, kept: &[Id]) -> Option<Evicted> {
        // Numbers ascend along a path.
        let keeps = |id: &Id| kept.binary_search(id).is_ok();
        let candidate = |(id, node): (&Id, &Node)| match node.children.is_empty() && !keeps(id) {
            true => Some((node.last_use, *id, true)),
            false => {
                let has_tail = node.tail.as_ref().is_some_and(|tail| !tail.is_empty());
                has_tail.then_some((node.last_end, *id, false))
            }
        };
        let blocks = self.nodes.iter().filter(|(_, node)| node.parent.is_some());
        let (_, oldest, is_leaf) = blocks.filter_map(candidate).min()?;
        if !is_leaf {
            self.set_tail(oldest, None);
            return Some(Evicted { blocks: 0, tails: 1 });
        }
        let (mut evicted, mut next) = (Evicted::default(), Some(oldest));
        while let Some(id) = next {
            evicted.blocks += 1;
            evicted.tails += usize::from(self.nodes[&id].tail.is_some());
            let parent = self.remove(id);
            let useless = |id: &Id| {
                let node = &self.nodes[id];
                let is_block = node.parent.is_some();
                is_block && node.children.is_empty() && node.tail.is_none() && !keeps(id)
            };
            next = parent.filter(useless);
        }
        Some(evicted)
    }

    /// Removes a leaf, and its root if nothing is left below it. Returns its parent.
    fn remove(&mut self, id: Id) -> Option<Id> {
        self.bytes -= self.bytes_of(id);
        let parent = self.nodes.remove(&id)?.parent?;
        let node = self.nodes.get_mut(&parent)?;
        node.children.retain(|_, child| *child != id);
        if node.parent.is_none() && node.children.is_empty() {
            self.nodes.remove(&parent);
            let salts = self.roots.extract_if(.., |_, root| *root == parent);
            self.bytes -= salts.map(|(salt, _)| salt.len()).sum::<usize>();
            return None;
        }
        Some(parent)
    }

    /// Returns the salt, the tokens and the nodes of each stored prompt that is not the prefix of
    /// another, those that were not used for the longest time first.
    pub(super) fn leaves(&self) -> Vec<(&str, Vec<u32>, Vec<Id>)> {
        let is_leaf = |(_, node): &(&Id, &Node)| node.parent.is_some() && node.children.is_empty();
        let mut leaves: Vec<_> = self.nodes.iter().filter(is_leaf).collect();
        leaves.sort_by_key(|(_, node)| node.last_use);
        let tokens: BTreeMap<Id, &[u32]> = self
            .nodes
            .values()
            .flat_map(|node| node.children.iter().map(|(tokens, id)| (*id, &**tokens)))
            .collect();
        let salts: BTreeMap<Id, &str> =
            self.roots.iter().map(|(salt, id)| (*id, &**salt)).collect();
        let prompt = |(&leaf, _): (&Id, &Node)| {
            let (mut path, mut at) = (vec![], leaf);
            while let Some(parent) = self.nodes[&at].parent {
                path.push(at);
                at = parent;
            }
            path.reverse();
            let all = path.iter().flat_map(|id| tokens[id]).copied().collect();
            (salts[&at], all, path)
        };
        leaves.into_iter().map(prompt).collect()
    }
}

/// Returns the bytes of a node.
fn bytes(block_tokens: usize, piece: &[u8], tail: Option<&[u8]>) -> usize {
    size_of::<u32>() * block_tokens + piece.len() + tail.map_or(0, <[u8]>::len)
}
