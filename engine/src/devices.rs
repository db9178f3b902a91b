//! Assigns the GPUs of one machine to processes.

use std::collections::BTreeMap;

/// GPUs that one runner assigns. A GPU has one holder at a time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuPool {
    all: Vec<String>,
    /// Indexes into `all`, by holder.
    held: BTreeMap<u32, Vec<usize>>,
}

impl GpuPool {
    /// Creates a set of free GPUs, named as in `CUDA_VISIBLE_DEVICES`.
    pub fn new(all: Vec<String>) -> Self {
        Self { all, held: BTreeMap::new() }
    }

    /// Returns the number of GPUs; 0 if processes run on CPUs.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Returns whether processes run on CPUs.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Assigns the first `count` free GPUs to `holder`, and returns the value of
    /// `CUDA_VISIBLE_DEVICES`. Returns `None` and assigns nothing if fewer are free.
    pub fn take(&mut self, holder: u32, count: u32) -> Option<String> {
        let is_free = |index: &usize| !self.held.values().flatten().any(|held| held == index);
        let free: Vec<usize> = (0..self.all.len()).filter(is_free).take(count as usize).collect();
        if free.len() < count as usize {
            return None;
        }
        let names: Vec<&str> = free.iter().map(|index| self.all[*index].as_str()).collect();
        let names = names.join(",");
        self.held.entry(holder).or_default().extend(free);
        Some(names)
    }

    /// Frees all GPUs of `holder`.
    pub fn release(&mut self, holder: u32) {
        self.held.remove(&holder);
    }

    /// Returns the GPU of an inference worker. Workers share the GPUs evenly, because the job fixes
    /// their number. Returns `None` if processes run on CPUs.
    pub fn of_worker(&self, slot: u32) -> Option<&str> {
        let index = (slot as usize).checked_rem(self.all.len())?;
        Some(&self.all[index])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(names: &str) -> GpuPool {
        GpuPool::new(names.split_whitespace().map(str::to_owned).collect())
    }

    #[test]
    fn concurrent_trials_get_different_gpus() {
        let mut devices = devices("GPU-a GPU-b GPU-c");
        assert_eq!(devices.take(0, 1).as_deref(), Some("GPU-a"));
        assert_eq!(devices.take(7, 1).as_deref(), Some("GPU-b"));
        assert_eq!(devices.take(8, 2), None, "a gang gets all of its GPUs or none");
        assert_eq!(devices.take(8, 1).as_deref(), Some("GPU-c"));
        assert_eq!(devices.take(9, 1), None);
        devices.release(7);
        devices.release(7);
        assert_eq!(devices.take(9, 1).as_deref(), Some("GPU-b"));
    }

    #[test]
    fn pool_counts_all_gpus() {
        let mut devices = devices("a b c");
        devices.take(0, 2);
        assert_eq!((devices.len(), devices.is_empty()), (3, false));
        assert_eq!((GpuPool::default().len(), GpuPool::default().is_empty()), (0, true));
    }

    #[test]
    fn gangs_get_one_gpu_per_rank() {
        let mut devices = devices("0 1 2 3 4");
        assert_eq!(devices.take(0, 2).as_deref(), Some("0,1"));
        assert_eq!(devices.take(1, 2).as_deref(), Some("2,3"));
        assert_eq!(devices.take(2, 2), None);
        devices.release(0);
        assert_eq!(devices.take(2, 3).as_deref(), Some("0,1,4"));
    }

    #[test]
    fn inference_workers_share_gpus_evenly() {
        let of = |names, workers| {
            let devices: GpuPool = devices(names);
            let gpus = (0..workers).map(|slot| devices.of_worker(slot).unwrap_or("-").to_owned());
            gpus.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(of("a b", 2), "a b");
        assert_eq!(of("a b", 5), "a b a b a");
        assert_eq!(of("", 2), "- -");
    }
}
