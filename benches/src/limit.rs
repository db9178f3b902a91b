//! The rate of the fastest square matrix product, as an estimate of the machine's limit.

use std::hint::black_box;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use burn::nn::LinearConfig;
use burn::tensor::{Device, Distribution, Tensor};
use serde::{Deserialize, Serialize};
use stoker_kernels::{Activation, LinearExt};
use stoker_trainer::Result;

use crate::protocol::{self, Side};

/// Sizes of the square matrices.
const SIZES: &str = "256,384,512,768,1024";
/// Number of times that each product is timed in a turn.
const REPEATS: usize = 20;

/// Greatest rate of a turn, in 1e9 floating-point operations per second.
#[derive(Debug, Deserialize, Serialize)]
struct Rate {
    gflops: f64,
}

/// Measures the products of burn and of the fused operators for each line of sizes from stdin.
///
/// # Errors
///
/// A command is invalid.
pub(crate) fn serve() -> Result<()> {
    let device = Device::default();
    while let Some(sizes) = protocol::next_command()? {
        let mut gflops = 0.0f64;
        for size in sizes.split(',') {
            let n: usize = size.parse()?;
            let left = Tensor::<2>::random([n, n], Distribution::Normal(0.0, 1.0), &device);
            let linear = LinearConfig::new(n, n).with_bias(false).init(&device);
            let mut time = |product: &dyn Fn() -> Tensor<2>| {
                black_box(product());
                for _ in 0..REPEATS {
                    let begin = Instant::now();
                    black_box(product());
                    let nanoseconds = begin.elapsed().as_nanos() as f64;
                    gflops = gflops.max(2.0 * (n as f64).powi(3) / nanoseconds);
                }
            };
            time(&|| left.clone().matmul(left.clone()));
            time(&|| linear.forward_fused(left.clone(), Activation::Identity));
        }
        protocol::respond(&Rate { gflops })?;
    }
    Ok(())
}

/// Returns the greatest rate of all programs in turns, in 1e9 operations per second.
///
/// # Errors
///
/// A program failed.
pub(crate) fn best_rate(programs: Vec<(&Path, Vec<String>)>, threads: usize) -> Result<f64> {
    let mut sides = vec![];
    for (program, arguments) in programs {
        let mut command = Command::new(program);
        command.args(arguments).env("RAYON_NUM_THREADS", threads.to_string());
        command.env("OMP_NUM_THREADS", threads.to_string());
        sides.push(Side::start("product", &mut command)?);
    }
    let mut best = 0.0f64;
    for _ in 0..3 {
        for side in &mut sides {
            best = best.max(side.request::<Rate>(SIZES)?.gflops);
        }
    }
    Ok(best)
}
