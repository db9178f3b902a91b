//! Comparisons of operators with burn's operators, finite differences and other thread counts.
//!
//! Operators under test take flat inputs and return a flat output, so that one function compares
//! operators of any rank. The loss of a backward pass is a weighted sum of the output.

use burn::prelude::*;
use burn::tensor::TensorData;

/// Operator on flat tensors.
pub(crate) type Operator<'a> = &'a dyn Fn(&[Tensor<1>]) -> Tensor<1>;

/// Largest difference of `f32` values, relative to 1 + their size.
const TOLERANCE: f32 = 2e-5;

/// Largest difference of an `f32` gradient from a finite difference, relative to 1 + its size.
const GRADIENT_TOLERANCE: f64 = 1e-4;

/// Returns burn's CPU device.
pub(crate) fn device() -> Device {
    Device::flex()
}

/// Runs the test `name` in a child process, where no other test samples from the random numbers of
/// the device. Returns `true` in the child.
#[track_caller]
pub(crate) fn is_alone(name: &str) -> bool {
    const ENV_CHILD: &str = "TEST_ALONE";
    if std::env::var_os(ENV_CHILD).is_some() {
        return true;
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let output = child.args(["--exact", name]).env(ENV_CHILD, "").output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}");
    false
}

/// Values and shape of a tensor.
pub(crate) struct Values<const D: usize> {
    values: Vec<f32>,
    shape: [usize; D],
}

impl<const D: usize> Values<D> {
    pub(crate) fn into_tensor(self, device: &Device) -> Tensor<D> {
        Tensor::from_data(TensorData::new(self.values, self.shape), device)
    }
}

/// Returns pseudo-random values from -1 to 1.
pub(crate) fn random<const D: usize>(shape: [usize; D], seed: u64) -> Values<D> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    Values { values: (0..shape.iter().product()).map(|_| next()).collect(), shape }
}

/// Inputs of an operator.
pub(crate) struct Case {
    pub(crate) inputs: Vec<Vec<f32>>,
}

impl Case {
    /// Creates random inputs of these sizes.
    pub(crate) fn new(sizes: &[usize]) -> Self {
        let seeded = sizes.iter().zip(1..);
        Self { inputs: seeded.map(|(size, seed)| random([*size], seed).values).collect() }
    }

    pub(crate) fn from_values(inputs: Vec<Vec<f32>>) -> Self {
        Self { inputs }
    }

    pub(crate) fn tensors(&self, device: &Device) -> Vec<Tensor<1>> {
        let tensor = |values: &Vec<f32>| {
            Tensor::from_data(TensorData::new(values.clone(), [values.len()]), device)
        };
        self.inputs.iter().map(tensor).collect()
    }
}

/// Output of an operator, and the gradients of its inputs.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) output: Vec<f32>,
    pub(crate) gradients: Vec<Vec<f32>>,
}

#[cfg(feature = "cubecl")]
impl Outcome {
    /// Returns the value whose gradients these are.
    pub(crate) fn loss(&self) -> f32 {
        let weights = loss_weights(self.output.len());
        self.output.iter().zip(weights).map(|(value, weight)| value * weight).sum()
    }
}

/// Returns the weight of each output in the loss.
fn loss_weights(num: usize) -> Vec<f32> {
    random([num], 99).values
}

/// Runs forward and backward pass.
pub(crate) fn run(case: &Case, operator: Operator<'_>) -> Outcome {
    run_on(&device(), case, operator)
}

/// Runs forward and backward pass on a device.
pub(crate) fn run_on(device: &Device, case: &Case, operator: Operator<'_>) -> Outcome {
    let device = device.clone().autodiff();
    let inputs: Vec<Tensor<1>> =
        case.tensors(&device).into_iter().map(Tensor::require_grad).collect();
    let output = operator(&inputs);
    let values: Vec<f32> = output.to_data().try_to_vec().unwrap();
    let weights = TensorData::new(loss_weights(values.len()), [values.len()]);
    let gradients = (output * Tensor::from_data(weights, &device)).sum().backward();
    let gradient = |input: &Tensor<1>| {
        let gradient = input.grad(&gradients).expect("each input has a gradient");
        gradient.into_data().try_to_vec().unwrap()
    };
    Outcome { output: values, gradients: inputs.iter().map(gradient).collect() }
}

#[track_caller]
fn assert_close(name: &str, part: &str, ours: &[f32], expected: &[f32]) {
    assert_eq!(ours.len(), expected.len(), "{name}: {part}");
    for (index, (ours, expected)) in ours.iter().zip(expected).enumerate() {
        let is_close = (ours - expected).abs() <= TOLERANCE * (1.0 + expected.abs());
        assert!(is_close, "{name}: {part} {index} is {ours} instead of {expected}");
    }
}

/// Compares the values of two tensors of the same shape.
#[track_caller]
pub(crate) fn assert_close_tensors<const D: usize>(
    name: &str,
    ours: Tensor<D>,
    expected: Tensor<D>,
) {
    assert_eq!(ours.dims(), expected.dims(), "{name}");
    let [ours, expected] =
        [ours, expected].map(|tensor| tensor.into_data().try_to_vec::<f32>().unwrap());
    assert_close(name, "value", &ours, &expected);
}

/// Compares output and gradients with those of burn's operator.
#[track_caller]
pub(crate) fn assert_matches_burn(
    name: &str,
    case: &Case,
    ours: Operator<'_>,
    burns: Operator<'_>,
) {
    let (ours, burns) = (run(case, ours), run(case, burns));
    assert_close(name, "output", &ours.output, &burns.output);
    for (index, (ours, burns)) in ours.gradients.iter().zip(&burns.gradients).enumerate() {
        assert_close(name, &format!("gradient {index} at"), ours, burns);
    }
}

/// Compares the gradients with central differences of `reference`, an operator in `f64`.
#[track_caller]
pub(crate) fn assert_gradients(
    name: &str,
    case: &Case,
    ours: Operator<'_>,
    reference: &dyn Fn(&[Vec<f64>]) -> Vec<f64>,
) {
    const STEP: f64 = 1e-5;
    let outcome = run(case, ours);
    let weights = loss_weights(outcome.output.len());
    let loss = |inputs: &[Vec<f64>]| -> f64 {
        let output = reference(inputs);
        assert_eq!(output.len(), weights.len(), "{name}: the reference has another size");
        output.iter().zip(&weights).map(|(value, weight)| value * f64::from(*weight)).sum()
    };
    let mut inputs: Vec<Vec<f64>> =
        case.inputs.iter().map(|input| input.iter().copied().map(f64::from).collect()).collect();
    for input in 0..inputs.len() {
        for index in 0..inputs[input].len() {
            let value = inputs[input][index];
            inputs[input][index] = value + STEP;
            let above = loss(&inputs);
            inputs[input][index] = value - STEP;
            let difference = (above - loss(&inputs)) / (2.0 * STEP);
            inputs[input][index] = value;
            let gradient = f64::from(outcome.gradients[input][index]);
            let is_close =
                (gradient - difference).abs() <= GRADIENT_TOLERANCE * (1.0 + difference.abs());
            assert!(
                is_close,
                "{name}: gradient {index} of input {input} is {gradient} instead of {difference}"
            );
        }
    }
}

/// Returns `f32` values as bits, which distinguish NaN and -0.
pub(crate) fn bits(data: &TensorData) -> Vec<u32> {
    data.clone().try_to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

/// Checks that output and gradients have equal bits with 1, 2, 4 and 8 threads.
#[track_caller]
pub(crate) fn assert_same_on_threads(
    case: &Case,
    operator: &(dyn Fn(&[Tensor<1>]) -> Tensor<1> + Sync),
) {
    let run_on = |num_threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(num_threads).build().unwrap();
        pool.install(|| run(case, operator))
    };
    let expected = run_on(1);
    let is_same = |ours: &[f32], expected: &[f32]| {
        ours.iter().zip(expected).all(|(ours, expected)| ours.to_bits() == expected.to_bits())
    };
    for num_threads in [1, 2, 4, 8] {
        let outcome = run_on(num_threads);
        assert!(is_same(&outcome.output, &expected.output), "output, {num_threads} threads");
        for (index, (ours, expected)) in
            outcome.gradients.iter().zip(&expected.gradients).enumerate()
        {
            assert!(is_same(ours, expected), "gradient {index}, {num_threads} threads");
        }
    }
}
