//! Limits of the machine: the rate of the fastest square matrix product, and the round-trip time
//! between two threads.

use std::hint::black_box;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Distribution, Tensor};
use serde::{Deserialize, Serialize};
use stoker_api::names::ENV_DEVICE;
use stoker_kernels::{Activation, LinearExt};
use stoker_trainer::{Result, Standalone};

use crate::protocol::{self, Side};
use crate::training::Precision;

/// Sizes of the square matrices on a CPU.
const CPU_SIZES: &str = "256,384,512,768,1024";
/// Sizes of the square matrices on a GPU.
const GPU_SIZES: &str = "2048,4096,8192";
/// Largest size for which the error of a product is measured.
const ERROR_SIZE_MAX: usize = 4096;
/// Number of rows of the product to compare.
const ERROR_ROWS: usize = 8;
/// Number of times that each product is timed in a turn.
const REPEATS: usize = 20;

/// Time for which round trips between two threads are measured.
const ROUND_TRIPS_TIME: Duration = Duration::from_millis(50);
/// Longest time to wait until the system moves one of two threads from their common processor.
const ROUND_TRIPS_TIME_MAX: Duration = Duration::from_secs(5);
/// Nanoseconds of a round trip above which both threads probably run on one processor.
const ONE_PROCESSOR: f64 = 2000.0;
/// Number of consecutive round trips in a measured interval.
const ROUND_TRIPS: usize = 100;

/// Greatest rate of a turn, in 1e9 floating-point operations per second.
#[derive(Debug, Deserialize, Serialize)]
struct Rate {
    gflops: f64,
    /// Relative error of a product, in the first turn: norm of the difference from the exact
    /// product, divided by the norm of the exact product.
    #[serde(default)]
    error: Option<f64>,
}

/// Measures the products of burn and of the fused operators for each line of sizes from stdin.
///
/// # Errors
///
/// A command is invalid, or the device fails.
pub(crate) fn serve(precision: Precision) -> Result<()> {
    let standalone =
        Standalone { quiet: true, mixed_precision: precision.mixed(), ..Standalone::default() };
    let context = standalone.context()?;
    let device = context.device().clone().without_autodiff();
    let mut is_first = true;
    while let Some(sizes) = protocol::next_command()? {
        let mut gflops = 0.0f64;
        for size in sizes.split(',') {
            let n: usize = size.parse()?;
            let left = Tensor::<2>::random([n, n], Distribution::Normal(0.0, 1.0), &device);
            let left = left.cast(context.dtype());
            let linear = LinearConfig::new(n, n).with_bias(false).init(&device);
            let linear =
                Linear { weight: linear.weight.map(|w| w.cast(context.dtype())), ..linear };
            let mut time = |product: &dyn Fn() -> Tensor<2>| -> Result<()> {
                black_box(product());
                for _ in 0..REPEATS {
                    device.sync().map_err(|error| error.to_string())?;
                    let begin = Instant::now();
                    black_box(product());
                    device.sync().map_err(|error| error.to_string())?;
                    let nanoseconds = begin.elapsed().as_nanos() as f64;
                    gflops = gflops.max(2.0 * (n as f64).powi(3) / nanoseconds);
                }
                Ok(())
            };
            time(&|| left.clone().matmul(left.clone()))?;
            time(&|| linear.forward_fused(left.clone(), Activation::Identity))?;
        }
        let sizes = sizes.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>()?;
        let size = sizes.into_iter().max().unwrap_or(1).min(ERROR_SIZE_MAX);
        let error = is_first.then(|| product_error(size, &device, context.dtype()));
        is_first = false;
        protocol::respond(&Rate { gflops, error })?;
    }
    Ok(())
}

/// Returns the relative error of a product of square matrices of normal values, in its first rows.
/// The inputs are rounded to `dtype`; the exact product uses the unrounded inputs.
fn product_error(size: usize, device: &Device, dtype: DType) -> f64 {
    let random = || Tensor::<2>::random([size; 2], Distribution::Normal(0.0, 1.0), device);
    let on_host = |tensor: Tensor<2>| -> Vec<f64> { tensor.into_data().iter::<f64>().collect() };
    let (left, right) = (random(), random());
    let product = left.clone().cast(dtype).matmul(right.clone().cast(dtype));
    let product = on_host(product.narrow(0, 0, ERROR_ROWS.min(size)));
    let (left, right) = (on_host(left), on_host(right));
    let (mut errors, mut squares) = (0.0, 0.0);
    for (row, product) in product.chunks_exact(size).enumerate() {
        let mut exact = vec![0.0; size];
        for (k, right) in right.chunks_exact(size).enumerate() {
            let left = left[row * size + k];
            exact.iter_mut().zip(right).for_each(|(sum, right)| *sum += left * right);
        }
        for (value, exact) in product.iter().zip(exact) {
            errors += (value - exact).powi(2);
            squares += exact.powi(2);
        }
    }
    (errors / squares).sqrt()
}

/// Returns the greatest rate of all programs in turns, in 1e9 operations per second.
///
/// # Errors
///
/// A program failed.
pub(crate) fn best_rate(
    programs: Vec<(&Path, Vec<String>)>,
    threads: usize,
    device: &str,
) -> Result<f64> {
    let sizes = if device == "cpu" { CPU_SIZES } else { GPU_SIZES };
    let mut sides = vec![];
    for (program, arguments) in programs {
        let mut command = Command::new(program);
        command.args(arguments).env("RAYON_NUM_THREADS", threads.to_string());
        command.env("OMP_NUM_THREADS", threads.to_string()).env(ENV_DEVICE, device);
        sides.push((program, Side::start("product", &mut command)?));
    }
    let mut bests = vec![0.0f64; sides.len()];
    for _ in 0..3 {
        for ((program, side), best) in sides.iter_mut().zip(&mut bests) {
            let Rate { gflops, error } = side.request(sizes)?;
            if let Some(error) = error {
                eprintln!("relative error of a product of {}: {error:.1e}", program.display());
            }
            *best = best.max(gflops);
        }
    }
    for ((program, _), gflops) in sides.iter().zip(&bests) {
        eprintln!("matrix products of {}: {gflops:.0} GFLOP/s", program.display());
    }
    Ok(bests.into_iter().fold(0.0, f64::max))
}

/// Returns the time that a value takes from this thread to another one and back, in nanoseconds:
/// the mean of the fastest 100 consecutive round trips. `None` if both threads probably ran on one
/// processor for five seconds.
pub(crate) fn round_trip() -> Option<f64> {
    const LAST: usize = usize::MAX;
    let value = AtomicUsize::new(0);
    // Waits until the value is `expected`, or the last one. Returns whether it is `expected`.
    let wait_for = |expected: usize| {
        for attempt in 1usize.. {
            let value = value.load(Ordering::Acquire);
            if value == expected || value == LAST {
                return value == expected;
            }
            // Another thread may need this processor.
            if attempt.is_multiple_of(10_000) {
                std::thread::yield_now();
            }
        }
        false
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for trip in 0.. {
                if !wait_for(2 * trip + 1) {
                    break;
                }
                value.store(2 * trip + 2, Ordering::Release);
            }
        });
        let mut fastest = f64::INFINITY;
        let mut trips = 0..;
        let begin = Instant::now();
        while begin.elapsed() < ROUND_TRIPS_TIME
            || (fastest > ONE_PROCESSOR && begin.elapsed() < ROUND_TRIPS_TIME_MAX)
        {
            let start = Instant::now();
            for trip in trips.by_ref().take(ROUND_TRIPS) {
                value.store(2 * trip + 1, Ordering::Release);
                wait_for(2 * trip + 2);
            }
            fastest = fastest.min(start.elapsed().as_nanos() as f64 / ROUND_TRIPS as f64);
        }
        value.store(LAST, Ordering::Release);
        (fastest <= ONE_PROCESSOR).then_some(fastest)
    })
}
