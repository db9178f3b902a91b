//! Test of the system's memory allocator in programs of the training library.

use std::process::ExitCode;

use crate::process::Pod;

/// Size of a tensor.
const BLOCK_BYTES: usize = 8 << 20;

/// Returns how often the kernel gave a page to this thread.
fn page_faults() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    // The name of the thread may contain spaces. The number of faults is the tenth field.
    stat.rsplit_once(") ").unwrap().1.split(' ').nth(7).unwrap().parse().unwrap()
}

/// Prints the number of page faults of ten steps, after the first one.
pub(crate) fn allocate() -> ExitCode {
    stoker_trainer::run(|_| {
        let step = || drop(std::hint::black_box([1, 2, 3, 4, 5].map(|_| vec![1_u8; BLOCK_BYTES])));
        step();
        let before = page_faults();
        (0..10).for_each(|_| step());
        println!("page faults: {}", page_faults() - before);
        Ok(())
    })
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn faults(tunables: &str) -> usize {
    let mut pod = Pod::new().without_trial().env("GLIBC_TUNABLES", tunables);
    let names = ["MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"];
    pod.env_options = names.into_iter().flat_map(|name| ["-u", name]).collect();
    let outcome = pod.run("allocate");
    let number = outcome.out.split("page faults: ").nth(1).unwrap_or_default();
    number.split_whitespace().next().unwrap().parse().unwrap()
}

/// With huge pages, both numbers are smaller.
#[test]
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn freed_memory_is_used_again() {
    let (kept, returned) = (faults(""), faults("glibc.malloc.perturb=0"));
    println!("{kept} page faults, with glibc's defaults {returned}");
    assert!(5 * kept < returned, "{kept} page faults, with glibc's defaults {returned}");
}
