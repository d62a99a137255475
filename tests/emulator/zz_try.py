import numpy as np, pytest, cases, flashkit
from flashkit import mods
from flashkit.backends.cuda_common import backend as cuda_backend

@pytest.mark.parametrize("det",[False,True])
@pytest.mark.parametrize("dtype",["float32","float64"])
@pytest.mark.parametrize(("backend","gen"),[("cupy_raw","simt"),("numba_cuda","simt"),("cupy_raw","sm80"),("cupy_raw","sm90")])
def test_try(device, launched, monkeypatch, dtype, backend, gen, det):
    import cupy
    monkeypatch.setenv(cuda_backend.VARIABLE, gen)
    if gen != "simt": dtype = {"float32":"bfloat16","float64":"float16"}[dtype]
    rng=np.random.default_rng(0)
    B,H,Hk,N,M,D=2,4,2,70,90,16
    dt=cases.numpy_dtype(dtype)
    q=rng.standard_normal((B,H,N,D)).astype(dt); k=rng.standard_normal((B,Hk,M,D)).astype(dt); v=rng.standard_normal((B,Hk,M,D)).astype(dt)
    f=np.float64 if dtype=="float64" else np.float32
    bias=rng.standard_normal((1,H,N,M)).astype(f); slopes=rng.standard_normal(H).astype(f)*.1; table=rng.standard_normal((H,7)).astype(f)
    mask=rng.standard_normal((M,)).astype(f)
    def fn(s,b,h,q,k,*,table,temp):
        return flashkit.where(q>k, s*temp, s)+ table[h,flashkit.clip(abs(q-k),0,6)]*s
    w=("bias","alibi_slopes","mask","score.table","score.temp","softcap","q","k","v","sinks")
    def run(be,xp):
        to=xp.asarray
        out,vjp=flashkit.attention_vjp(to(q),to(k),to(v),bias=to(bias),alibi_slopes=to(slopes),mask=to(mask),softcap=3.0,sinks=to(np.linspace(-1,1,H).astype(f)),
          causal=True,window=(60,3),kv_lengths=[M,80],q_offset=2,dropout_p=.2,seed=3,backend=be,deterministic=det,
          score_mod=mods.score(fn,table=to(table),temp=0.7))
        do=np.random.default_rng(1).standard_normal(out.shape).astype(dt)
        return [cases.to_numpy(x).astype(np.float64) for x in vjp(to(do),wrt=w)], vjp, to(do)
    exp,*_=run("reference",np)
    got,vjp,do=run(backend,cupy)
    print(launched)
    for n,a,b in zip(w,got,exp):
        err=np.abs(a-b).max(); print(n,err,np.abs(b).max())
    tol={"float64":1e-9,"float32":2e-4}.get(dtype,6e-2)
    for n,a,b in zip(w,got,exp):
        assert np.abs(a-b).max()<=tol*max(np.abs(b).max(),1), n
    if det:
        device.seed(5)
        again=[cases.to_numpy(x).astype(np.float64) for x in vjp(do,wrt=w)]
        for a,b in zip(got,again): np.testing.assert_array_equal(a,b)
