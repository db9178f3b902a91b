//! Restores one checkpoint on all ranks. One rank of each pod reads it, and the others map its
//! memory.

use burn::module::Module;
use bytes::Bytes;
use stoker_api::contract::{CheckpointRef, HashAlgorithm, Manifest};
use stoker_storage::hash;

use super::run::Run;
use super::state::RunState;
use crate::checkpoint::{CheckpointContents, FileParts, Restored, SharedFiles, SharedIndex};
use crate::collective::RankActivity;
use crate::error::Infrastructure;
use crate::{Result, record};

impl<M: Module + 'static, B: Send + 'static> Run<'_, M, B> {
    /// Restores the checkpoint that rank 0 found complete, on all ranks. Without one, all ranks get
    /// the model of rank 0.
    pub(super) fn restore_on_all_ranks(&mut self) -> Result<Restored> {
        let ranks = self.context.distributed();
        if ranks.size() == 1 {
            return self.restore_local();
        }
        ranks.record_activity(RankActivity::Wait);
        // The first rank of each pod reads at the same time as rank 0. Both usually find the same.
        let mut restored = Ok(Restored::default());
        if ranks.local_rank() == 0 {
            restored = self.restore_local();
        }
        let mut failed = Ok(());
        let (chosen, mut restored) = match restored {
            Ok(restored) => (Ok(restored.chosen.clone()), restored),
            // Rank 0 may have found another checkpoint.
            Err(error) if ranks.rank() > 0 => {
                failed = Err(error);
                (Ok(None), Restored::default())
            }
            Err(error) => (Err(error), Restored::default()),
        };
        let chosen = ranks.gather_results("start", chosen)?.swap_remove(0);
        let is_same = restored.chosen == chosen;
        if ranks.local_rank() == 0 && !is_same {
            print_refusals(&restored);
        }
        let Some(chosen) = chosen else {
            ranks.gather_results("restore", failed)?;
            self.equalize_models()?;
            return Ok(Restored { refused: restored.refused, ..Restored::default() });
        };
        if ranks.local_rank() == 0 && !is_same {
            restored = self.read_chosen(&chosen)?;
        }
        if ranks.local_size() > 1 {
            restored = self.share_in_pod(restored, &chosen)?;
        }
        ranks.record_activity(RankActivity::Train);
        Ok(restored)
    }

    /// Restores a checkpoint on this rank, but none that was trained beyond the granted length.
    fn restore_local(&self) -> Result<Restored> {
        let is_beyond = |contents: &CheckpointContents| {
            RunState::read(contents).is_ok_and(|state| {
                state.continue_id == self.state.continue_id && state.batches > self.granted
            })
        };
        self.io().restore(is_beyond)
    }

    /// Replaces the model of each rank by that of rank 0, unless all are bit-identical. Models are
    /// usually identical, because all ranks initialize from the same seed.
    fn equalize_models(&mut self) -> Result<()> {
        let ranks = self.context.distributed();
        let is_lead = ranks.rank() == 0;
        let file = record::snapshot(&*self.model).into_file();
        let (file, hash) = match file {
            Ok(file) => {
                let parts = file.clone().into_parts();
                let hash = hash::file_hash(&parts, HashAlgorithm::Blake3);
                (file, Ok(hash.hex().to_owned()))
            }
            Err(error) => (FileParts::default(), Err(error)),
        };
        let hashes = ranks.gather_results("model", hash)?;
        ranks.record_activity(RankActivity::Train);
        if hashes.iter().all(|hash| *hash == hashes[0]) {
            return Ok(());
        }
        let model = ranks.collective().broadcast(match is_lead {
            true => file.into_bytes(),
            false => {
                // Free the copy of this model before the other one arrives.
                drop(file);
                Bytes::new()
            }
        })?;
        if is_lead {
            return Ok(());
        }
        let contents = CheckpointContents::from([(record::MODEL.into(), model)]);
        self.model.replace(|model| record::load_model(model, &contents))
    }

    /// Reads the checkpoint that rank 0 chose.
    fn read_chosen(&self, chosen: &CheckpointRef) -> Result<Restored> {
        let restored = self.io().restore_from(std::slice::from_ref(chosen))?;
        match restored.refused.first_key_value() {
            None => Ok(restored),
            Some((name, why)) => {
                let text = format!("cannot read checkpoint {name}, although rank 0 can: {why}");
                Err(Infrastructure(text).into())
            }
        }
    }

    /// Returns the checkpoint that the first rank of the pod read, in memory that its ranks share.
    /// If a rank cannot access this memory, it reads the checkpoint from the storage.
    fn share_in_pod(&self, mut restored: Restored, chosen: &CheckpointRef) -> Result<Restored> {
        let ranks = self.context.distributed();
        let mut shared = None;
        if let Some((_, manifest, contents)) = &mut restored.checkpoint {
            match SharedFiles::new(contents) {
                Ok((files, mapped)) => {
                    *contents = mapped;
                    shared = Some((files, manifest.clone()));
                }
                Err(error) => {
                    let text = "cannot share the checkpoint in this pod";
                    eprintln!("stoker: {text}: {error}; each rank reads it from the storage");
                }
            }
        }
        let index: Option<(SharedIndex, Manifest)> =
            shared.as_ref().map(|(files, manifest)| (files.index().clone(), manifest.clone()));
        let index = ranks.broadcast_local(index)?;
        if ranks.local_rank() > 0 {
            restored = match index.map(|(files, manifest)| (files.open(), manifest)) {
                Some((Ok(contents), manifest)) => Restored {
                    checkpoint: Some((chosen.name.clone(), manifest, contents)),
                    chosen: Some(chosen.clone()),
                    ..Restored::default()
                },
                unshared => {
                    if let Some((Err(error), _)) = unshared {
                        let text = "cannot open the checkpoint that this pod shares";
                        eprintln!("stoker: {text}: {error}; reading it from the storage");
                    }
                    self.read_chosen(chosen)?
                }
            };
        }
        // The memory must exist until all ranks have opened it.
        ranks.allgather_local(())?;
        Ok(restored)
    }
}

/// Prints what the first rank of a pod refused, if it found another checkpoint than rank 0. Only
/// rank 0 has a terminal.
fn print_refusals(restored: &Restored) {
    for (name, why) in &restored.refused {
        eprintln!("stoker: checkpoint {name} cannot be used in this pod: {why}");
    }
}
